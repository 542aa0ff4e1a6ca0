"""Where the parts of preparing data run beside one machine (lm.data.executor)."""
