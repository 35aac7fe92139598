"""``python -m reward_server``."""

import sys

if __name__ == "__main__":
    sys.exit(
        "reward_server: the verifier server is planned and not part of this version; "
        "train with label rewards meanwhile (reward: {sources: {label: 1.0}})"
    )
