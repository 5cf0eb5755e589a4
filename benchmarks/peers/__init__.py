"""Other people's kernels on the simulator, unmodified: which run, what the checker finds, and why.

    python -m benchmarks.peers kraken=PATH recipes=PATH ... --json peers.json --page docs/peers.md

One module per repository says which of its functions are called, on which inputs, and what result
torch gives for them. None of their code is in this repository: PATH is a checkout of theirs.
"""
