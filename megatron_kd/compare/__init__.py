# SPDX-License-Identifier: Apache-2.0
"""One recipe trained with several losses, on the same data from the same seed, side by side."""
