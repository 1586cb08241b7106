"""Predicted and learned times: of prompts, of steps, of what a client will see."""
