"""Judges: language models that grade samples, in the role `judge` or remotely.

- `questions`: what a judge is asked about a row, and the rewards that follow from its answers; pure.
- `material`: texts of policies as data that cannot end its own part of a message.
- `answers`: the form of an answer, and how it is read.
- `calibration`: examples with scores, and the agreement of a judge with them.
"""
