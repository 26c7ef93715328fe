"""Does the suite notice when the product is wrong? Wrong changes, one at a time, and a score.

``python -m tests.mutations`` runs them, ``lists/`` says what they are.
"""
