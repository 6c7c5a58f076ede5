"""Batch generation with the exact distribution behind every token. Start at `pipeline.pipeline`."""

from pipeline.audit_record import AuditRecord
from pipeline.contract import Capabilities
from pipeline.errors import InvalidRequest
from pipeline.grammars.grammar import Grammar
from pipeline.lengths import ConfidenceThreshold, ThroughputSchedule, measure_cost
from pipeline.ngram import NgramProposer
from pipeline.params import SamplingParams
from pipeline.pipeline import SpeculativePipeline
from pipeline.proposer import Contexts, Proposed, Proposer
from pipeline.rollout import Rollout, SamplingMask, TopLogprobs
from pipeline.rollouts import Rollouts
from pipeline.version import __version__

__all__ = [
    "AuditRecord",
    "Capabilities",
    "ConfidenceThreshold",
    "Contexts",
    "Grammar",
    "InvalidRequest",
    "NgramProposer",
    "Proposed",
    "Proposer",
    "Rollout",
    "Rollouts",
    "SamplingMask",
    "SamplingParams",
    "SpeculativePipeline",
    "ThroughputSchedule",
    "TopLogprobs",
    "__version__",
    "measure_cost",
]
