"""The verifier: a model that scores answers, from data to training to serving.

``model.Verifier`` scores; ``encoding.encode`` is the one way in which training, the process and the server read a chat.
"""
