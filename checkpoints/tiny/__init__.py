"""The small trained checkpoint that ships with the package, and how it was made.

``language`` is the closed language it speaks, ``batches`` its training data; ``model`` and
``train`` made it, ``export`` wrote it, ``evaluate`` measures it. See ``MODEL_CARD.md``.
"""
