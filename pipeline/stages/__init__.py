"""The ten stages of a round, one a file, in the order in which `pipeline.pipeline` lists them."""

from pipeline.stages.adjust import Adjust
from pipeline.stages.admit import Admit
from pipeline.stages.capture import Capture
from pipeline.stages.commit import Commit
from pipeline.stages.draft import Draft
from pipeline.stages.finish import Finish
from pipeline.stages.forward import Forward
from pipeline.stages.pack import Pack
from pipeline.stages.prefill import Prefill
from pipeline.stages.verify import Verify

__all__ = [
    "Adjust",
    "Admit",
    "Capture",
    "Commit",
    "Draft",
    "Finish",
    "Forward",
    "Pack",
    "Prefill",
    "Verify",
]
