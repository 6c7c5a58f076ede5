"""Batch generation with the exact distribution behind every token. Start at `pipeline.pipeline`."""

from pipeline.drafting.lengths import ConfidenceThreshold, ThroughputSchedule, measure_cost
from pipeline.drafting.ngram import NgramProposer
from pipeline.drafting.proposer import Contexts, Proposed, Proposer
from pipeline.errors import InvalidRequest
from pipeline.grammars.grammar import Grammar
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.contract import Capabilities
from pipeline.policy.params import SamplingParams
from pipeline.results.audit_record import AuditRecord
from pipeline.results.rollout import Rollout, SamplingMask, TopLogprobs
from pipeline.results.rollouts import Rollouts
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
