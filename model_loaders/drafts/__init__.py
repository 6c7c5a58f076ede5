"""Draft models: one module a method, their shared backbone, and their checkpoints.

proposal.py: what a draft offers to the pipeline, and how tokens are drawn. backbone.py: the layers that fill a block.
block_draft.py: backbone, cache and target put together. dflash.py, dspark.py, dflash2.py: the methods. checkpoint.py:
loading and saving; formats/: one published layout a file, and which one a folder has.
"""

from model_loaders.drafts.checkpoint import load_draft, save_draft
from model_loaders.drafts.proposal import Draft, Drafted, ProposalLaw

__all__ = ["Draft", "Drafted", "ProposalLaw", "load_draft", "save_draft"]
