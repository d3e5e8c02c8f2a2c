# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.lag` builds the test accelerator ahead of the tests that use it."""

from tests.support.lag.build import build, why_not

reason = why_not()
print(f"the test accelerator cannot be used here: {reason}" if reason else build())
