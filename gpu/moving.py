"""Arrays and records between the host and a device.

Who works on arrays wherever they are asks for others `beside` them, and for what the host must see by `to_host`.
"""

from dataclasses import fields, replace
from typing import Any

from gpu.adjust.record import History, LogitBias
from gpu.arrays import Array, on_device
from gpu.capture.record import Capture
from gpu.proposal.record import LogitsLaw
from gpu.support.record import Support
from gpu.verification.record import Verdict


def to_host(value: Any) -> Any:
    """A NumPy array, or a Support, Verdict, Capture or LogitsLaw of NumPy arrays as the host's kernels make them.

    What is on the host already comes back itself; a device's is copied, and waited for, on CuPy's current stream. Of a
    Support the entries behind a row's count, and of a row that carries none, aren't defined.
    """
    if isinstance(value, Capture):
        return _capture_to_host(value) if on_device(value.counts) else value
    if isinstance(value, Support):
        return _mapped(replace(value, walk=None), to_host) if on_device(value.status) else value
    if isinstance(value, Verdict):
        return _mapped(value, to_host) if on_device(value.tokens) else value
    if isinstance(value, LogitsLaw):
        return _law_mapped(value, to_host) if on_device(value.logits) else value
    if not on_device(value):
        return value
    from gpu.device.memory import download

    return download(value)


def beside(array: Array, value: Any) -> Any:
    """An array, Verdict, History, LogitBias or LogitsLaw where `array` is: itself, or its copy.

    A copy is queued on CuPy's current stream; what comes from a device is waited for.
    """
    if not on_device(array):
        return to_host(value)
    if isinstance(value, Verdict | History | LogitBias):
        return _mapped(value, lambda own: beside(array, own))
    if isinstance(value, LogitsLaw):
        return _law_mapped(value, lambda own: beside(array, own))
    if on_device(value):
        return value
    from gpu.device.memory import upload

    return upload(value)


def _capture_to_host(capture: Capture) -> Capture:
    """Cut to the entries that it has."""
    row_start, offsets = to_host(capture.row_start), to_host(capture.offsets)
    num_rows = int(row_start[-1])
    total = int(offsets[num_rows])
    if total > capture.token_ids.size:
        raise ValueError(f"room={capture.token_ids.size}, expected at least {total} entries for these masks")
    return Capture(
        to_host(capture.status), to_host(capture.failed_row), to_host(capture.counts), row_start,
        offsets[: num_rows + 1], to_host(capture.token_ids[:total]), to_host(capture.logprobs[:total]),
    )  # fmt: skip


def _law_mapped(law: LogitsLaw, change: Any) -> LogitsLaw:
    parts = {name: change(values) for name, (values, _, _) in law.parts().items()}
    return replace(law, logits=change(law.logits), **parts)


def _mapped(record: Any, change: Any) -> Any:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return type(record)(**{name: None if value is None else change(value) for name, value in values.items()})
