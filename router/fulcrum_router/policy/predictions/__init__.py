"""Predicted and learned times: of prompts, of steps, of what a client will see.

Pure. Instances learn from responses and probes; dispatch, admission and the journey predict.
"""
