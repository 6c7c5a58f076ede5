"""Hugging Face datasets: one row a rollout, in the columns of `pipeline.results.rollouts.SCHEMA`.

The provenance is kept in the dataset's `info.description`, as JSON, where saving to disk keeps it too. Needs the
extra `datasets`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import InvalidRequest
from pipeline.results.rollouts import METADATA_KEY, Rollouts

if TYPE_CHECKING:
    from datasets import Dataset


def to_dataset(rollouts: Rollouts) -> Dataset:
    """A dataset over the rollouts' Arrow table.

    Raises:
        ImportError: Without the package `datasets`.
    """
    from datasets import Dataset, DatasetInfo, Features

    table = rollouts.to_arrow()
    description = table.schema.metadata[METADATA_KEY].decode()
    table = table.replace_schema_metadata(None)
    return Dataset(table, info=DatasetInfo(description=description, features=Features.from_arrow_schema(table.schema)))


def from_dataset(dataset: Dataset) -> Rollouts:
    """The rollouts of what `to_dataset` gave, also after it was selected from, shuffled, saved or loaded.

    Raises:
        InvalidRequest: Another dataset; a row whose arrays don't line up, by its index.
    """
    description = dataset.info.description
    if not description.startswith("{") or '"format"' not in description:
        raise InvalidRequest(f"description={description[:40]!r}, expected what to_dataset wrote")
    table = dataset.with_format("arrow")[:]
    return Rollouts.from_arrow(table.replace_schema_metadata({METADATA_KEY: description}))
