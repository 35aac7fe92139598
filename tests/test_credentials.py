"""What looks like a secret is found in every spelling, and what innocent files hold stays."""

import base64
import random
import string
import uuid

import pytest

from maporl.credentials import is_secret, secrets_in, without_secrets

pytest.importorskip("kingfisher_sdk")

DRAW = random.Random(5)
BOTH, LOWER, HEX, CAPITALS = string.ascii_letters + string.digits, string.ascii_lowercase + string.digits, "0123456789abcdef", string.ascii_uppercase + string.digits  # fmt: skip


def some(count, characters=BOTH):
    return "".join(DRAW.choice(characters) for _ in range(count))


KEYS = {
    # the form of each key: how it begins, and what is drawn. No whole key stands in this file
    "Anthropic": "sk-ant-api03-" + some(93, BOTH + "-_") + "AA", "OpenAI": "sk-proj-" + some(74) + "T3Blbk" + "FJ" + some(74),
    "OpenRouter": "sk-or-v1-" + some(64, HEX), "Groq": "gsk_" + some(52), "xAI": "xai-" + some(80), "Perplexity": "pplx-" + some(48),
    "NVIDIA": "nvapi-" + some(64), "Replicate": "r8_" + some(37), "Tavily": "tvly-dev-" + some(32), "Cerebras": "csk-" + some(48, LOWER),
    "Fireworks": "fw_" + some(24), "Pinecone": "pcsk_" + some(6) + "_" + some(63), "Jina": "jina_" + some(60),
    "Hugging Face": "hf_" + some(34, string.ascii_letters), "LangSmith": "lsv2_pt_" + some(32, HEX) + "_" + some(10, HEX),
    "Google API": "AIza" + some(35), "Google OAuth": "ya29." + some(60), "Google client": "GOCSPX-" + some(28),
    "AWS access": "AKIA" + some(16, string.ascii_uppercase + "234567"), "GitHub": "ghp_" + some(36), "GitHub app": "ghs_" + some(36),
    "GitHub fine-grained": "github_pat_" + some(22) + "_" + some(59), "GitLab": "glpat-" + some(20), "npm": "npm_" + some(36),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + some(80), "Stripe": "sk_live_" + some(24), "Stripe restricted": "rk_live_" + some(24),
    "SendGrid": "SG." + some(22) + "." + some(43), "Slack bot": "xoxb-" + some(12, string.digits) + "-" + some(12, string.digits) + "-" + some(24),
    "Databricks": "dapi" + some(32, HEX), "DigitalOcean": "dop_v1_" + some(64, HEX), "Docker": "dckr_pat_" + some(27),
    "Shopify": "shpat_" + some(32, HEX), "Linear": "lin_api_" + some(40), "Notion": "ntn_" + some(46), "Grafana": "glsa_" + some(32) + "_" + some(8, HEX),
    "Vault": "hvs." + some(95), "Telegram": some(10, "123456789") + ":AA" + some(33), "Doppler": "dp.pt." + some(43), "New Relic": "NRAK-" + some(27, CAPITALS),
}  # fmt: skip
NAMED = {
    # keys without a form of their own: only the name beside them tells
    "MISTRAL_API_KEY": some(32), "COHERE_API_KEY": some(40), "TOGETHER_API_KEY": some(64, HEX), "AZURE_OPENAI_API_KEY": some(32, HEX),
    "aws_secret_access_key": some(40, BOTH + "/+"), "WANDB_API_KEY": some(40, HEX), "DD_APP_KEY": some(40, HEX), "X_API_KEY": some(32),
    "session_token": some(60), "client_secret": some(32), "api-key": some(32, LOWER), "db_password": some(20),
}  # fmt: skip
SPELLINGS = {
    "YAML": "options:\n  {name}: {key}\n  seconds: 5\n", "environment": "export {name}={key}\n", "JSON": '{{"{name}": "{key}", "n": 1}}',
    "header": "GET /v1 HTTP/1.1\r\nX-Api-Key: {key}\r\nAccept: */*\r\n", "Bearer": "Authorization: Bearer {key}\r\nAccept: */*",
    "escaped": '{{\\"{name}\\": \\"{key}\\"}}', "sentence": "It answered that the {name} is {key}, so I took it.",
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fifty_forms_of_keys_are_found_in_every_spelling(spelling):
    missed = []
    for name, key in (KEYS | NAMED).items():
        # a key with a form of its own is found without the name of a secret
        beside = name if name in NAMED else "value"
        text = SPELLINGS[spelling].format(name=beside, key=key)
        found = secrets_in(text)
        if any(part in text_without(text, found) for part in (key, key[:-4])):
            missed.append((name, found))
    assert len(KEYS | NAMED) >= 50 and not missed


def text_without(text, found):
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, "")
    return text


INNOCENT = {
    "commit": f"commit {some(40, HEX)}\nMerge: {some(7, HEX)} {some(7, HEX)}\n", "sha256": f"{some(64, HEX)}  model.safetensors\nsha256: {some(64, HEX)}\n",
    "revision": f"mistralai/Mistral-7B-Instruct-v0.3 at {some(40, HEX)}, facebook/opt-125m: {some(32, HEX)}",
    "uuid": f"run {uuid.UUID(int=DRAW.getrandbits(128))}, wandb run {some(8, LOWER)}, the key {uuid.UUID(int=DRAW.getrandbits(128))}",
    "picture": f"<img src='data:image/png;base64,{base64.b64encode(DRAW.randbytes(30_000)).decode()}'>",
    "models": "meta-llama/Llama-3.1-8B-Instruct, unsloth/Qwen2.5-VL-72B-Instruct-unsloth-bnb-4bit, org/gemma-2-2b-it-Q4_K_M.gguf, token: Qwen2ForCausalLM",
    "numbers": f"The product is {some(60, string.digits)}. My key is {some(24, string.digits)}, pi is 3.14159265358979323846264338327950288.",
    "words": "xai-labs is a company; the npm_config file; a r8_b test; task_key=short; monkey: banana; sk-learn is scikit-learn",
    "vocabulary": '{"pad_token": "<|reserved_special_token_0|>", "eos_token": "<|im_end|>", "model_max_length": 1000000000000000019884624838656}',
    "variables": "api: {key_variable: OPENAI_API_KEY_2}\nexport HF_TOKEN=$MY_TOKEN\napi_key=os.environ['OPENAI_API_KEY']\nAuthorization: Bearer ${TOKEN}",
    "code": "key = VoxtralRealtimeConv1dCacheLayer\nself.token_type_ids_2 = tokenizer_class_v2_something1\npublic_key: " + some(40),
    "games": "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1; secret word: hangman; the secret is 42; GATTACAGATTACAGATTACAGATTACA",
    "addresses": "http://localhost:8000/v1 and https://example.org/?page=2&q=a+long+question https://arxiv.org/abs/2402.03300v3",
}  # fmt: skip


@pytest.mark.parametrize("name", INNOCENT)
def test_what_innocent_texts_hold_is_not_a_secret(name):
    assert secrets_in(INNOCENT[name]) == {}


def test_options_with_the_name_of_a_secret_are_replaced_and_others_stay():
    random_text = some(32)
    names = ("X-Api-Key", "token", "access_key", "private_key", "apiToken", "client-secret", "password", "OPENAI_API_KEY", "auth.key")  # fmt: skip
    values = {"options": dict.fromkeys(names, random_text), "pad_token": "<pad>", "seconds": 5, "api_keys": ["a", "b"]}  # fmt: skip
    public = without_secrets(values)
    assert public == {
        "options": dict.fromkeys(names, "(taken out)"), "pad_token": "<pad>", "seconds": 5, "api_keys": "(taken out)",
    }  # fmt: skip
    assert is_secret("password", 735914) and not is_secret("password", None) and not is_secret("save_token", True)
