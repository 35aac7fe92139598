"""What a user gives the games of PettingZoo and Gymnasium beside their options."""


def cells(observation, agent):
    """The free cells of a board, and who asks."""
    return f"{agent}: {int(observation['action_mask'].sum())} free"


def last_digit(words, legal):
    """The last digit of the words, which must be legal."""
    digits = [c for c in words if c.isdigit()]
    if not digits or digits[-1] not in legal:
        raise ValueError(f"{words!r} names no free cell")
    return legal[digits[-1]]


def broken(observation, agent):
    return observation["nothing"]


def number(observation, agent):
    return 3
