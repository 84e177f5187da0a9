# SPDX-License-Identifier: Apache-2.0
"""Before a run and around it: is this machine fit for it, are all nodes alike, how is it submitted to Slurm."""
