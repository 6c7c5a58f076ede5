"""Draft models: one module a method, their shared backbone, and their checkpoints.

block_draft.py: a draft as the pipeline sees it: backbone, cache and target put together. proposal.py: what it proposes,
and how tokens are drawn. backbone.py: the layers that fill a block. dflash.py, dspark.py, dflash2.py: the methods.
finding.py: where a checkpoint is, and whether it is one; checkpoint.py: loading and saving; whole.py: what a draft
borrows, put into its checkpoint; formats/: one published layout a file, and which one a folder has.
"""

from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.checkpoint import load_draft, save_draft
from model_loaders.drafts.finding import FoundDraft, find_draft
from model_loaders.drafts.proposal import Drafted, ProposalLaw

__all__ = ["BlockDraft", "Drafted", "FoundDraft", "ProposalLaw", "find_draft", "load_draft", "save_draft"]
