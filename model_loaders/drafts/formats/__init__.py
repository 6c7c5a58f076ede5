"""Published layouts of draft checkpoints, one a file, each with ``read`` (and ``write`` where drafts are saved in it).

zlab.py: DFlash and DFlash 2. deepspec.py: DSpark. specforge.py: DSpark as SpecForge writes it. speculators.py: DFlash
and DSpark in vllm-project/speculators' layout. transformers_assistant.py: refused by name. detect.py tells them apart;
values.py reads what a Qwen3-style config.json says in all of them.
"""
