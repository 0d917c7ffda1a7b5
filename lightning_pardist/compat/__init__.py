"""Adapters for what torch and Lightning keep private: one file per foreign part, and one for patches.

Nothing outside this package uses a private name of torch or Lightning. Every file says why there is no public way and
lists its names, each with who needs it and what to do when a release moves it; a contract test checks the lists.

Files whose name begins with ``lightning`` import lightning, and may be imported by what may do so itself.
"""
