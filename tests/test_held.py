"""Fields of records that may be on a device: what is held, what is read, and what stays as it was."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import gpu
from pipeline.batch.held import held, read_on_host


class Far(np.ndarray):
    """Stands for a device's array."""

    simulated_device = True

    def get(self):
        self.asked.append(True)
        return np.array(self)


@read_on_host("values", "others")
@dataclass(frozen=True)
class Record:
    values: np.ndarray
    number: int
    others: np.ndarray | None = None


@pytest.fixture
def far():
    array = np.arange(5).view(Far)
    array.asked = []
    return array


def test_a_hosts_array_is_itself():
    values = np.arange(3)
    record = Record(values, 2)
    assert record.values is held(record, "values") is values
    assert record.others is held(record, "others") is None
    assert values.flags.writeable


def test_a_devices_is_copied_once_for_who_looks(far):
    record = Record(far, 2)
    assert held(record, "values") is far
    assert not far.asked
    first = record.values
    assert type(first) is np.ndarray
    assert record.values is first
    assert len(far.asked) == 1
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    changed = replace(record, values=first * 2)
    assert held(changed, "values").tolist() == [0, 2, 4, 6, 8]
    assert held(record, "values") is far


def test_beside_follows_the_array(far):
    values = np.arange(3)
    assert gpu.beside(values, values) is values
    assert gpu.beside(far, far) is far
    assert type(gpu.beside(values, far)) is np.ndarray
