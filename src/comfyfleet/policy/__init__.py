"""Verbs: pure functions over the model. Time, ids and chance are arguments; nothing here does I/O."""
