"""The engine on a CUDA device: ordinary and speculative decoding, recording in four ways, beside transformers itself.

    python -m benchmarks.engine [--target demo] [--draft demo NAME=FOLDER ...] [--prompts FILE ...]
                                [--batches 8 32 1] [--tokens 256] [--temperatures 1 0] [--settings ...] [--repeats 3]
                                [--compile] [--proposal auto] [--peer-batch 8] [--peer-tokens 256]
                                [--no-compiled-peer] [--on-off-rounds 6] [--unbounded-rounds 6] [--soak 98304]
                                [--seconds S] [--results FOLDER] [--device cuda]
    python -m benchmarks.engine --table [--into FILE]

Settings of an arm: "off": top-k 64 and top-p 0.95, nothing recorded; "top-K 32" and "top-K 128": supports of that many
tokens recorded with their log-probabilities; "filtered": supports of top-p 0.95 on the 1,024 likeliest. Every draft is
an arm beside ordinary decoding; by default all that are shipped for the demo. A run asks as many of the demo's
questions as there are slots and ignores EOS; with --prompts it asks twelve times as many prompts, one of each file in
turn, and they end where they end. Sampled at temperature 1, the drafts proposed as `proposal` says ("auto": drawn);
greedy beside it. The first batch size runs at every temperature, the others at the first.

The arms of a batch size, a temperature and a setting run in turn, so a slow spell hits all of them; runs in which a
shape was new don't count; a rate is the median of the others, prefill counted in. "ms a round" is the median time from
one round's results to the next's, "host" what of it the host didn't wait for results; "tokens a round" leaves the first
tokens out, which prefills yield; of every run "ms_to_first" is the time to the first results, "ms_of_slowest" the
longest between two, and "ms_behind_last" what followed them. "peak" is the device memory a method took for a batch size
beyond the models' weights, its graphs' included. "in_rounds" is the share of the later half of a run in which the
device was between the begin and the end of a graph, by events, and "kernels_in_rounds" how much of the time in graphs,
unprofiled, kernels and copies fill by the profiler's records: the least that it can be, since it loses some.

Then transformers' generate (greedy, the same prompts); masks on against off: batch 32, 512 tokens, alternating runs;
masks of top-p 0.95 alone against those with a top_k of 1,024 beside it, the same way, at temperature 0.7; and 98,304
tokens, every second request recorded: each mask there, in its place, with its token in it. What fails is noted with its
error and the rest goes on; nothing new begins after `--seconds`, and what was left out is listed. The results are
written after every part.

transformers' own DFlash generate has no arm: the versions that have it (5.17 to 5.24) know one architecture of
assistants, which belongs to another target.
"""
