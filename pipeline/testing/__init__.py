"""A kit that any speculative method can be held against: `check_proposer`.

reference.py   the policy of a row in float64, by sorting; it shares no code with the kernels
law.py         the exact law of short outputs by enumeration, and the chi-square test against samples
records.py     records: aligned, complete, the policy's own, and without influence
kit.py         all of it for one method, with a report
"""

from model_loaders import tiny_target
from pipeline.testing.kit import Report, check_proposer
from pipeline.testing.law import check_law, enumerate_law, p_value
from pipeline.testing.records import check_alignment, check_masks

__all__ = [
    "Report",
    "check_alignment",
    "check_law",
    "check_masks",
    "check_proposer",
    "enumerate_law",
    "p_value",
    "tiny_target",
]
