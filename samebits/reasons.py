"""The gate's words in reports: what a verdict rests on, and what calls that ran the reference are counted under."""

from __future__ import annotations

from samebits.verdict import SIGNATURE_LIMIT

A_CALL = "a call"
MADE_UP = "made-up inputs"
STORED = "a stored verdict"
VOUCHED = "a stored verdict and a call"

AWAITED = "a stored verdict says verified; the comparison that is to confirm it is not read yet"
CAPTURING = "a CUDA graph is being captured and this signature is not verified yet"
COMPARED = "compared with eager at this call"
ELSEWHERE = "another thread is comparing this signature"
FORKED = "this process was forked after CUDA was initialised"
FULL = f"the op already has {SIGNATURE_LIMIT} signatures, all of which are being compared"
HINTED = "a stored verdict says verified; made both ways at this call, to confirm it"
KILLED = "SAMEBITS_DISABLE is set"
RECHECKED = "a verified call that was made both ways again"
RETRY = "will be tried again"
