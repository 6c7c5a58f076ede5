"""Training of draft models: the target writes its own text, a draft learns to foresee it.

prompts.py: what the target is asked to write about. writing.py: the target writes. dataset.py: the written
text on disk. blocks.py: one training step's blocks. loss.py: its loss. dspark.py, dflash2.py: the heads of these
methods. trainer.py: the loop, checkpoints and the log. acceptance.py: rounds of speculative decoding, counted. The
command line is model_loaders/train_draft.py.
"""
