"""Evaluation: tasks, arms, records and reports; the roofline; replay; the proof of the mask."""
