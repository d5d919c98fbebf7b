"""The small trained checkpoint that ships with the package, and how it was made.

``language`` is the closed language it speaks, ``batches`` its training data; ``model`` and
``train`` made it, ``export`` wrote it, ``evaluate`` measures it. ``scenes`` and ``tasks`` are what
the second training step adds to the language, ``second`` that step. See ``MODEL_CARD.md``.
"""
