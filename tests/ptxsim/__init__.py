"""Runs the PTX of kernels, as NVRTC emits it, on a deliberately weak memory, in random interleavings. For tests.

    parse.py        PTX text to instructions
    arithmetic.py   instructions on registers, as Python expressions
    translate.py    a kernel to Python functions, each with at most one access to memory
    memory.py       the memory model
    machine.py      grids of threads, and who runs next

A clean run is evidence, not proof. The model is operational and ours, not PTX's axiomatic one: it reorders stores,
lets loads see old values, and tears wide accesses, but no load takes its value after a later access of its thread has
been done, nothing is delivered to some observers before others, and only the schedules of the seeds tried are seen. It
knows nothing of caches' sizes, of a compiler's further freedom, or of ptxas. What it does not know, it refuses.
"""
