"""Adapters for private names of torch and Lightning: one file per area, and one for the patches.

Nothing outside this package uses a private name of torch or Lightning. Every file says why there is no public way and
lists its names, each with its use and what to do when a release moves it; a contract test checks the lists.

Files whose name begins with ``lightning`` import lightning; only code that may import lightning may import them.
"""
