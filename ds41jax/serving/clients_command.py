"""`ds41jax clients`: ready configuration for the usual clients."""

import argparse
import json

from ds41jax.serving.incoming import EFFORTS
from ds41jax.serving.server import MODEL_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--url", default="http://localhost:8000", help="default: %(default)s")
    parser.add_argument("--model-name", default=MODEL_NAME, metavar="ID")
    parser.add_argument("--key", default="none", metavar="KEY", help="if the server needs one")
    parser.add_argument("--context", type=int, default=16384, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Prints the configurations."""
    url = args.url.rstrip("/")
    for title, text in _configurations(url, args.model_name, args.key, args.context):
        print(f"# {title}\n{text}\n")
    efforts = ", ".join(f"{name} = {meaning}" for name, meaning in EFFORTS.items())
    print(f"# Effort names\n{efforts}\nA number from 1 to 100 is taken as it is.")
    return 0


def _configurations(url: str, model: str, key: str, context: int) -> list[tuple[str, str]]:
    pi = {
        "providers": {
            "ds41jax": {
                "baseUrl": f"{url}/v1",
                "api": "openai-completions",
                "apiKey": key,
                "models": [
                    {
                        "id": model,
                        "reasoning": True,
                        "input": ["text", "image"],
                        "contextWindow": context,
                        "maxTokens": context // 2,
                    }
                ],
            }
        }
    }
    openai = (
        f'client = openai.OpenAI(base_url="{url}/v1", api_key="{key}")\n'
        f'client.chat.completions.create(model="{model}", reasoning_effort="high",\n'
        '    messages=[{"role": "user", "content": "Hello"}])'
    )
    anthropic = (
        f'client = anthropic.Anthropic(base_url="{url}", api_key="{key}")\n'
        f'client.messages.create(model="{model}", max_tokens=4096,\n'
        '    messages=[{"role": "user", "content": "Hello"}])'
    )
    web = f"OPENAI_API_BASE_URL={url}/v1\nOPENAI_API_KEY={key}\nENABLE_OLLAMA_API=false"
    claude = f"ANTHROPIC_BASE_URL={url}\nANTHROPIC_AUTH_TOKEN={key}\nANTHROPIC_MODEL={model}"
    return [
        ("OpenAI SDK (Python)", openai),
        ("Anthropic SDK (Python)", anthropic),
        ("Programs built on the Anthropic SDK (environment)", claude),
        ("Pi agent: ~/.pi/agent/models.json", json.dumps(pi, indent=2)),
        ("Open WebUI (environment)", web),
    ]
