"""Targets: causal language models of transformers, run row by row over a `RowCache`.

target.py: a target as the pipeline and the drafts see it. causal_masks.py: what its tokens attend to. model_facts.py:
what a model has to be asked for. weights.py: their hash, and new ones. loading.py: from a checkpoint to a target.
checkpoint.py: where a checkpoint is, and its files. refusals.py: what can't be served. demo.py: the demo model.
tiny.py: a random one for tests of laws.
"""

from model_loaders.targets.loading import load_target
from model_loaders.targets.target import Target, TargetOutput
from model_loaders.targets.tiny import tiny_target

__all__ = ["Target", "TargetOutput", "load_target", "tiny_target"]
