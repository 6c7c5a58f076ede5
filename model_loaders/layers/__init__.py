"""What models are made of here, in the place of transformers' own parts: the same numbers from fewer or faster calls.

attention.py: the attention that targets run with. compact.py: forwards that leave rows of a block out. fused_norm.py:
norms in one call. packed_linear.py: products on a CPU. joint_linear.py: several products as one. lean_layer.py: a
decoder layer of these on a GPU. taps.py: what layers put out, for a draft.
"""
