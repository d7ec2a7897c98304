"""Two reward functions of constants."""


def one(responses):
    return [1.0] * len(responses)


def half(responses):
    return [0.5] * len(responses)
