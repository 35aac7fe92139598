"""How many updates some recipes need until answers differ, and how brief others may be taught."""

# enough for answers of different worth, without which groups of equals have no gradient
BRIEF = {"steps": 15, "batch_size": 8, "learning_rate": 1e-2}
LONGER = {
    "g_ra": {"steps": 40},
    "spa_rl": {"steps": 40},
    "turn_ppo": {"steps": 40},
    "oni": {"steps": 40},
    "at_grpo_code": {"steps": 80},
    "search_self_play": {"steps": 60},
    "parl": {"steps": 60},
    "reseek": {"steps": 40},
    "cooper": {"steps": 40},
    "spice": {"steps": 80},
    "absolute_zero": {"steps": 60},
    "metaagent_x": {"steps": 40},
}
