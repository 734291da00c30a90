"""`scripts/bench growth`: what many waiters, processes, names, permits and readers cost, as curves, and as a model.

curves has what is measured and shown, sender the messages, server the crowds that are messages only, clients the
crowds that are real clients, model the arithmetic for 100,000 clients, plots the pictures, command the options.
"""
