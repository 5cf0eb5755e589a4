"""Ranks as coroutines: streams, launches and host work of many ranks in one process."""
