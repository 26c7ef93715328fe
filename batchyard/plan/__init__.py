"""The order in which requests run, and the chunks that they run in. Pure; local files only.

A plan is a file of fixed-size records, one per request, in the order of execution. It is made in
one pass over the input: each request's *prompt key* (the bytes that its prompt begins with) and
its record go through an external merge sort, so memory stays flat whatever the file's size, and
requests that share a prefix come out side by side: byte order over prompts is a depth-first walk
of their prefix trie. An engine that serves first come, first served then finds each prefix in its
KV cache while it is warm. Requests of one adapter come one after the other: they share nothing with
those of others, and an engine has few adapters at hand at once. Only the end of a batch has another
concern, see ``tail``.

Where requests may share an answer (``duplicates``), the first of them runs and the others are its
*copies*: their records follow its own, in the same chunk, and have no tokens.

``planner`` makes a plan, with ``order`` and ``cutter``. Who only reads one needs ``records``.
"""
