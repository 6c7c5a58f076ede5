"""Prompts from a JSONL or Parquet file of any size: checked before anything is loaded, then read a shard at a time.

A line of a JSONL file is an object with one of "prompt" (a string), "messages" (a list of chat messages) and
"token_ids" (a list of integers), and perhaps "params" (sampling parameters of its own over the common ones) and "id" (a
name of its own, which its rollouts carry). Empty lines are passed over. A Parquet file (``*.parquet``) has columns of
these names, with null for what a row doesn't have; "params" is a struct, or JSON text (which a "logit_bias" needs).

Checking holds no more than a line or a row group, and eight bytes a prompt with an id; reading, a shard's prompts.

contents.py: the lines and rows of a file. line.py: a prompt of one. scan.py: all checked, and divided into shards.
reader.py: a shard's prompts.
"""

from pipeline.prompt_file.line import PromptLine
from pipeline.prompt_file.reader import PromptReader
from pipeline.prompt_file.scan import PromptScan, Shard, scan_prompts

__all__ = ["PromptLine", "PromptReader", "PromptScan", "Shard", "scan_prompts"]
