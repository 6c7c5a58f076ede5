"""The manifest of a job: what is generated, and with what. Part by part it must be the same when a job goes on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InvalidRequest, short
from pipeline.files import written_whole
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.prompt_file import Shard
from pipeline.running.provenance import describe

FORMAT = "specmask.job.v1"
REQUEST_PARTS = ("prompts", "params", "shard_size")
"""What the caller asks for; it is compared before a model is loaded."""
PIPELINE_PARTS = ("target", "draft", "options", "stages", "dtype", "device")
"""What generates."""


@dataclass(frozen=True)
class Manifest:
    """A job's identity and its plan.

    Attributes:
        seed: Where parameters have none, a request's seed comes from this one and the prompt's index.
        parts: By the names of REQUEST_PARTS and PIPELINE_PARTS.
        shards: The prompts file in runs.
        versions: Of what the job was started with, for a reader.
    """

    seed: int
    parts: dict[str, Any]
    shards: list[Shard]
    versions: dict[str, str]

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        held = {"format": FORMAT, "seed": self.seed, "parts": self.parts, "versions": self.versions}
        held |= {"shards": [list(shard) for shard in self.shards]}
        with written_whole(path) as file:
            file.write((json.dumps(held, allow_nan=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """What `write` wrote.

        Raises:
            InvalidRequest: It isn't one.
            OSError: It can't be read.
        """
        try:
            held = json.loads(path.read_bytes())
            if held["format"] != FORMAT:
                raise ValueError(f"format={short(held['format'])}, expected {FORMAT!r}")
            shards = [Shard(*map(_natural, shard)) for shard in held["shards"]]
            seed, parts, versions = _natural(held["seed"]), held["parts"], held["versions"]
            if not shards or seed >= 1 << 64 or set(parts) != {*REQUEST_PARTS, *PIPELINE_PARTS}:
                raise ValueError("parts, shards or seed aren't a job's")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"{path}: expected a job's manifest: {type(error).__name__}: {error}") from None
        return cls(seed, parts, shards, versions)

    @property
    def num_samples(self) -> int:
        """Samples of all prompts."""
        return sum(shard.num_samples for shard in self.shards)

    def check(self, parts: dict[str, Any], where: str) -> None:
        """Refuse parts that aren't this job's.

        Raises:
            InvalidRequest: A part that differs: what is different in it, what to do, and both hashes.
        """
        for name, value in parts.items():
            new, old = part_sha256(value), part_sha256(self.parts[name])
            if new != old:
                raise InvalidRequest(
                    f"the job in {where} was started with other {name} ({_difference(value, self.parts[name])}); use "
                    f"the same, or a new folder: {name} sha256={new}, expected {old}"
                )


def part_sha256(value: Any) -> str:
    """The hash of a part: the file's, of a model with its configuration's; else of its JSON with sorted keys."""
    if isinstance(value, dict) and isinstance(value.get("sha256"), str) and not value.get("num_weight_updates"):
        if value.get("config_sha256") is None:
            return value["sha256"]
        value = [value["sha256"], value["config_sha256"]]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def params_part(params: SamplingParams) -> dict[str, Any]:
    """The common parameters; processors by name, without the addresses that change with every process."""
    return json.loads(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(params.to_dict())))


def pipeline_parts(pipe: SpeculativePipeline) -> dict[str, Any]:
    """What generates: models by hash, options, stages put in a stage's place, dtype and kind of device."""
    described = json.loads(json.dumps(describe(pipe.state, pipe.capabilities, ())))
    foreign = {
        name: f"{type(stage).__module__}.{type(stage).__qualname__}"
        for name, stage in pipe.stages.items()
        if not type(stage).__module__.startswith("pipeline.")
    }
    return {
        "target": described["target"],
        "draft": described["draft"],
        "options": described["options"],
        "stages": foreign,
        "dtype": described["dtype"],
        "device": described["device"].partition(":")[0],
    }


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{short(value)}, expected an integer of at least 0")
    return value


def _difference(new: Any, old: Any) -> str:
    if not (isinstance(new, dict) and isinstance(old, dict)):
        return f"{short(new)}, expected {short(old)}"
    names = [name for name in {**old, **new} if name != "sha256" and new.get(name) != old.get(name)]
    shown = [f"{name}={short(new.get(name))}, expected {short(old.get(name))}" for name in names[:3]]
    return "; ".join(shown) or "another content"
