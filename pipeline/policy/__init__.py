"""How a request is sampled, and what can be served exactly.

params.py    SamplingParams: one request's policy, limits and records
contract.py  which requests are served, and which are refused, with the reason; the one order of a policy's parts
policies.py  the policies of a batch's requests as `gpu` takes them
names.py     what is said of a name that nothing has
reasons.py   refusals of one kind
"""
