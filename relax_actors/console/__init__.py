"""Web console of a run: an HTTP server beside it that reads its broker, and the page that the server sends.

`server.py` serves `app.py` on a loopback address, and `guard.py` decides who may ask. `run.py` connects to a run and
keeps its `picture.py`, `log_stream.py` sends its log, and `api/` has one file for each answer. The page in `page/` is
plain ES modules. `activation.py` starts the console of `relax up` when somebody opens its link.
"""
