"""A stand-in for the Tinker service: the HTTP routes that its SDK calls, over a tiny model with real LoRA adapters.

``Stub(folder)`` serves the model in ``folder``. The set ``wrong`` has what it does wrongly, of :data:`WRONG`.
"""

import io
import json
import tarfile
import threading
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save
from tinker.proto import tinker_public_pb2 as pb
from transformers import AutoModelForCausalLM, DynamicCache

from trl_ext.models.forward import base_of, cache_arguments

WRONG = (
    "mean_tokens",  # the loss is divided by the tokens of a request
    "mean_rows",  # by its rows
    "mean_step",  # by the rows of all requests of a step
    "mean_sequence",  # each row's by its tokens
    "sign",  # advantages are costs
    "no_clip",  # grad_clip_norm is ignored
    "shifted",  # log-probabilities are those of the token before
    "unordered",  # forward passes are made before the optimizer steps that were asked for earlier
    "left_over",  # a new adapter begins with the weights of the last one that was unloaded
    "halved",  # the loss is divided by something else
)
JSON_TYPES = {"float32": np.float32, "int64": np.int64}
PROTO_TYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


class Refused(Exception):
    """An answer with an HTTP status other than 200."""

    def __init__(self, status, **headers):
        super().__init__(str(status))
        self.status, self.headers = status, headers


class Stub:
    """The service.

    ``calls`` counts requests by route. ``busy`` is how many requests are answered by 429 first. ``lost`` has sessions
    that the service closed. ``silent`` stops answers of the routes in it.
    """

    def __init__(self, folder, wrong=(), bases=()):
        self.wrong, self.lost, self.silent = set(wrong), set(), set()
        self.bases = {str(base): AutoModelForCausalLM.from_pretrained(base).eval() for base in (folder, *bases)}
        self.calls, self.busy, self.log = {}, 0, []
        self.models, self.optimizers, self.states, self.samplers, self.names = {}, {}, {}, {}, {}
        self.answers, self.waiting, self.seen, self.numbers, self.lock = {}, {}, {}, count(1), threading.RLock()
        self.left, self.late, self.failures, self.counts = None, {}, [], {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(b"")

            def do_POST(self):
                self.reply(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def reply(self, body):
                kind = "application/json"
                try:
                    found = stub.answer(self.path, body, self.headers)
                    status, more = 200, {}
                    if isinstance(found, bytes):
                        kind = "application/octet-stream"
                    elif isinstance(found, tuple):
                        found, kind = found[0], "application/x-protobuf"
                    else:
                        found = json.dumps(found).encode()
                except Exception as error:
                    if not isinstance(error, Refused):
                        stub.failures.append(error)
                        error = Refused(500)
                    found, status, more = b'{"detail": "refused by the stub"}', error.status, error.headers
                try:
                    self.send_response(status)
                    for name, value in {"Content-Type": kind, "Content-Length": str(len(found)), **more}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(found)
                except OSError:  # who asked is gone
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        assert not self.failures, self.failures

    # -- routes -------------------------------------------------------------------------------------------------------

    def answer(self, path, body, headers):
        route = path.removeprefix("/api/v1/")
        with self.lock:
            self.calls[route] = self.calls.get(route, 0) + 1
            if self.busy and route in ("asample", "forward_backward", "forward", "optim_step"):
                self.busy -= 1
                raise Refused(429, **{"Retry-After": "0"})
        while route in self.silent:
            threading.Event().wait(0.05)
        if route.endswith("/archive"):
            raise Refused(302, Location=f"{self.url}{path.removesuffix('/archive')}/download")
        if route.endswith("/external_weights_urls"):
            where = f"{self.url}{path.removesuffix('/external_weights_urls')}/file/"
            files = ("adapter_config.json", "adapter_model.safetensors")
            return {"urls": {name: where + name for name in files}, "expires": "2100-01-01T00:00:00Z"}
        if "/checkpoints/" in route:
            run, _, rest = route.removeprefix("training_runs/").partition("/checkpoints/")
            return self.files(run, rest)
        if route.endswith("/finish"):
            with self.lock:
                for name in [name for name in self.models if name.split(":")[0] == route.split("/")[1]]:
                    self.unload(name)
            return {}
        if route.startswith("samplers/"):
            return {"sampler_id": route[9:], "base_model": self.samplers[route[9:]][0]}
        simple = {"client/config": {}, "telemetry": {"status": "accepted"}, "healthz": {"status": "ok"}}
        if route in simple:
            return simple[route]
        proto = "protobuf" in (headers.get("Content-Type") or "")
        asked = self.from_proto(body) if proto else json.loads(body or b"{}")
        with self.lock, torch.random.fork_rng():
            if route == "retrieve_future":
                if asked["request_id"] in self.waiting:
                    self.sampled(asked["request_id"])
                return self.retrieved(asked["request_id"], "protobuf" in (headers.get("Accept") or ""))
            return getattr(self, route, self.missing)(asked)

    def missing(self, asked):
        raise Refused(404)

    def future(self, asked, result):
        """Keep what ``result()`` returns; a request that was sent before keeps its answer."""
        key = (asked.get("model_id") or asked.get("sampling_session_id"), asked.get("seq_id"))
        if key in self.seen and key[1] is not None:
            return {"request_id": self.seen[key]}
        name = self.seen[key] = str(next(self.numbers))
        self.answers[name] = result()
        return {"request_id": name, "model_id": asked.get("model_id")}

    def retrieved(self, name, proto):
        found = self.answers[name]
        if isinstance(found, dict) or proto:
            return found if isinstance(found, dict) else (found[1](), "proto")
        return found[0]

    def alive(self, name):
        if name.split(":")[0] in self.lost or (":train:" in name and name not in self.models):
            raise Refused(410 if name.split(":")[0] in self.lost else 404)

    def create_session(self, asked):
        return {"type": "create_session", "session_id": f"s{next(self.numbers)}"}

    def session_heartbeat(self, asked):
        return {"type": "session_heartbeat"}

    def get_info(self, asked):
        base = self.names[asked["model_id"]][0]
        data = {"model_name": base, "tokenizer_id": base, "arch": "llama"}
        return {"type": "get_info", "model_data": data, "model_id": asked["model_id"], "is_lora": True}

    def weights_info(self, asked):
        base, rank, *_ = self.states[asked["tinker_path"]]
        return {"base_model": base, "is_lora": True, "lora_rank": rank}

    def get_server_capabilities(self, asked):
        return {"supported_models": [{"model_name": base} for base in self.bases]}

    # -- models -------------------------------------------------------------------------------------------------------

    def create_model(self, asked):
        self.alive(asked["session_id"])
        if asked["base_model"] not in self.bases:
            raise Refused(400)
        name, lora = f"{asked['session_id']}:train:{asked['model_seq_id']}", asked["lora_config"]
        self.add(name, asked["base_model"], lora["rank"], lora.get("seed") or 0)
        return self.future({}, lambda: {"type": "create_model", "model_id": name})

    def add(self, name, base, rank, seed=0):
        torch.manual_seed(seed)
        adapter = f"a{next(self.numbers)}"
        config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = self.bases[base]
        if isinstance(model, PeftModel):
            model.add_adapter(adapter, config)
        else:
            model = self.bases[base] = get_peft_model(model, config, adapter_name=adapter).eval()
        self.models[name], self.names[name] = (model, adapter), (base, rank)
        if "left_over" in self.wrong and self.left is not None and self.left[0] == rank:
            set_peft_model_state_dict(model, self.left[1], adapter)
        model.set_adapter(adapter)
        parameters = [p for n, p in model.named_parameters() if f".{adapter}." in n]
        self.optimizers[name] = torch.optim.AdamW(parameters)

    def unload_model(self, asked):
        self.unload(asked["model_id"])
        return self.future({}, lambda: {"type": "unload_model", "model_id": asked["model_id"]})

    def unload(self, name):
        if name in self.models:
            model, adapter = self.models.pop(name)
            self.left = self.names[name][1], {k: v.clone() for k, v in self.state(model, adapter).items()}
            self.optimizers.pop(name)
            if len(model.peft_config) > 1:
                model.set_adapter(next(other for other in model.peft_config if other != adapter))
                model.delete_adapter(adapter)

    def state(self, model, adapter):
        return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)

    @contextmanager
    def speaking(self, name):
        """The model of a training client, or of a sampler, with its adapter on."""
        base = self.samplers[name][0] if name in self.samplers else self.names[name][0]
        if name not in self.models:  # a sampler of the base
            model = self.bases[base]
            with model.disable_adapter() if isinstance(model, PeftModel) else nullcontext():
                yield model
        else:
            model, adapter = self.models[name]
            model.set_adapter(adapter)
            yield model

    def add_sampler(self, name, base, rank, weights):
        self.samplers[name] = (base,)
        if weights is not None:
            self.add(name, base, rank)
            set_peft_model_state_dict(self.models[name][0], weights, self.models[name][1])

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, asked):
        return self.forward_backward({"forward_only": True, **asked}, "forward_input")

    def forward_backward(self, asked, key="forward_backward_input"):
        self.alive(asked["model_id"])
        return self.future(asked, lambda: self.passes(asked["model_id"], asked[key], asked.get("forward_only", False)))

    def passes(self, name, given, forward_only):
        logprobs, losses = [], []
        late = self.late.pop(name, []) if "unordered" in self.wrong and forward_only else []
        with self.speaking(name) as model, torch.set_grad_enabled(not forward_only):
            rows = [[t for chunk in datum["model_input"]["chunks"] for t in chunk["tokens"]] for datum in given["data"]]
            # what follows a row changes nothing in it, so that rows of all lengths go through the model at once
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            tables = torch.log_softmax(model(ids).logits.float(), -1)
            for datum, row, table in zip(given["data"], rows, tables, strict=True):
                fields = {key: torch.tensor(read(one)) for key, one in datum["loss_fn_inputs"].items()}
                found = table[: len(row)].gather(1, fields["target_tokens"].unsqueeze(1)).squeeze(1)
                if "shifted" in self.wrong:
                    found = torch.roll(found, 1)
                logprobs.append(found.detach().numpy())
                if given["loss_fn"] == "importance_sampling":
                    loss = -(torch.exp(found - fields["logprobs"]) * fields["advantages"]).sum()
                else:
                    loss = -(found * fields["weights"]).sum()
                losses.append(loss / (len(found) if "mean_sequence" in self.wrong else 1))
            total = torch.stack(losses).sum()
            for kind, divisor in (
                ("mean_tokens", sum(map(len, logprobs))), ("mean_rows", len(losses)), ("sign", -1), ("halved", len(losses) ** 2),
            ):  # fmt: skip
                total = total / divisor if kind in self.wrong else total
            if not forward_only:
                total.backward()
                self.counts[name] = self.counts.get(name, 0) + len(losses)
                self.log.append(("backward", name))
        for step in late:
            self.stepped(step)
        metrics = {"loss:sum": float(total.detach())}
        outputs = [{"logprobs": {"data": p.tolist(), "dtype": "float32", "shape": [len(p)]}} for p in logprobs]
        said = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}
        return said, lambda: forward_backward_proto(logprobs, metrics)

    def optim_step(self, asked):
        self.alive(asked["model_id"])
        if "unordered" in self.wrong:
            self.late.setdefault(asked["model_id"], []).append(asked)
            return self.future(asked, lambda: {"metrics": {}})
        return self.future(asked, lambda: self.stepped(asked))

    def stepped(self, asked):
        optimizer = self.optimizers[asked["model_id"]]
        given = asked.get("adam_params") or asked.get("optim_params")
        group = optimizer.param_groups[0]
        group |= {"lr": given["learning_rate"], "betas": (given["beta1"], given["beta2"]), "eps": given["eps"]}
        group["weight_decay"] = given.get("weight_decay", 0.0)
        clip = given.get("grad_clip_norm", 0.0)
        acts = clip > 0 and "no_clip" not in self.wrong
        count = self.counts.pop(asked["model_id"], 1)
        for parameter in group["params"] if "mean_step" in self.wrong else ():
            parameter.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(group["params"], clip if acts else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        self.log.append(("step", asked["model_id"]))
        return {"metrics": {"grad_norm:mean": float(norm)}}

    # -- saving -------------------------------------------------------------------------------------------------------

    def kept(self, name):
        model, adapter = self.models[name]
        return {key: value.clone() for key, value in self.state(model, adapter).items()}

    def save_weights(self, asked, kind="weights"):
        name = asked["model_id"]
        self.alive(name)
        path = f"tinker://{name}/{kind}/{asked['path']}"
        optimizer = json_free(self.optimizers[name].state_dict())
        self.states[path] = (*self.names[name], self.kept(name), optimizer)
        route = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
        return self.future(asked, lambda: {"type": route.get(kind, "save_weights_external"), "path": path})

    def save_weights_external(self, asked):
        return self.save_weights(asked, "external_weights")

    def save_weights_for_sampler(self, asked):
        name = asked["model_id"]
        if asked.get("path"):
            return self.save_weights(asked, "sampler_weights")
        self.alive(name)
        session = f"{name.split(':')[0]}:sample:{asked['sampling_session_seq_id']}"
        self.add_sampler(session, *self.names[name], self.kept(name))
        return self.future(asked, lambda: {"type": "save_weights_for_sampler", "sampling_session_id": session})

    def load_weights(self, asked):
        base, rank, weights, optimizer = self.states[asked["path"]]
        name = asked.get("model_id") or f"{asked['session_id']}:train:{asked['model_seq_id']}"
        self.alive(name.split(":")[0])
        if name not in self.models:
            self.add(name, base, rank)
        set_peft_model_state_dict(*self.models[name][:1], weights, self.models[name][1])
        if asked["optimizer"]:
            self.optimizers[name].load_state_dict(optimizer)
        return self.future(asked, lambda: {"type": "load_weights", "path": asked["path"], "model_id": name})

    def files(self, run, rest):
        checkpoint, _, wanted = rest.rpartition("/")
        if "/file" in checkpoint:
            checkpoint = checkpoint.removesuffix("/file")
        base, rank, weights, _ = self.states[f"tinker://{run}/{checkpoint}"]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": None}
        files = {
            "adapter_config.json": json.dumps({**config, "base_model_name_or_path": base, "task_type": "CAUSAL_LM"}),
            "adapter_model.safetensors": save({key: value.contiguous() for key, value in weights.items()}),
        }
        files = {name: one if isinstance(one, bytes) else one.encode() for name, one in files.items()}
        if wanted in files:
            return files[wanted]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, one in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(one)
                archive.addfile(entry, io.BytesIO(one))
        return packed.getvalue()

    # -- sampling -----------------------------------------------------------------------------------------------------

    def create_sampling_session(self, asked):
        self.alive(asked["session_id"])
        name = f"{asked['session_id']}:sample:{asked['sampling_session_seq_id']}"
        weights = self.states[asked["model_path"]] if asked.get("model_path") else (asked["base_model"], None, None)
        self.add_sampler(name, *weights[:3])
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def asample(self, asked):
        """Keep the request until an answer is waited for: those that came meanwhile are decoded together."""
        self.alive(asked["sampling_session_id"])
        given = self.future(asked, lambda: None)
        if self.answers[given["request_id"]] is None:
            self.waiting[given["request_id"]] = asked
        return given | {"sample_sequence_ids": ["one"]}

    @torch.no_grad()
    def sampled(self, wanted):
        """Decode what ``wanted`` waits for, with all requests of its sampler whose prompts are as long."""
        first = self.waiting[wanted]
        alike = [name for name, asked in self.waiting.items() if shape(asked) == shape(first)]
        group = [self.waiting.pop(name) for name in alike]
        prompts = torch.tensor([tokens(asked) for asked in group])
        generators = [torch.Generator().manual_seed(asked["sampling_params"].get("seed") or 0) for asked in group]
        said, logprobs = [[] for _ in group], [[] for _ in group]
        with self.speaking(first["sampling_session_id"]) as model:
            cache = DynamicCache()
            out = model(prompts, **cache_arguments(base_of(model), cache))
            table = torch.log_softmax(out.logits[:, :-1].float(), -1)
            before = table.gather(2, prompts[:, 1:].unsqueeze(2)).squeeze(2).tolist()
            while True:
                last = torch.log_softmax(out.logits[:, -1].float(), -1)
                drawn = [draw(*row) for row in zip(last, group, generators, strict=True)]
                for row, token in enumerate(drawn):
                    if not done(said[row], group[row]):
                        said[row].append(token)
                        logprobs[row].append(float(last[row, token]))
                if all(map(done, said, group)):
                    break
                out = model(torch.tensor(drawn).unsqueeze(1), **cache_arguments(base_of(model), cache))
        for name, asked, *row in zip(alike, group, said, logprobs, before, strict=True):
            self.answers[name] = answer_of(asked, *row)

    def from_proto(self, body):
        message = pb.ForwardBackwardRequest()
        message.ParseFromString(body)
        data = []
        for datum in message.data:
            fields = {
                name: {"data": np.frombuffer(one.dense, PROTO_TYPES[one.dtype]), "dtype": None}
                for name, one in datum.loss_fn_inputs.items()
            }
            chunks = [{"tokens": np.frombuffer(c.encoded_text.tokens, np.int32).tolist()} for c in datum.model_input]
            data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": fields})
        given = {"data": data, "loss_fn": message.loss_fn}
        only = {"forward_only": message.forward_only, "forward_backward_input": given}
        return {"model_id": message.model_id, "seq_id": message.seq_id, **only}


def tokens(asked):
    return [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]


def shape(asked):
    return asked["sampling_session_id"], len(tokens(asked))


def draw(last, asked, generator):
    temperature = asked["sampling_params"]["temperature"]
    if temperature == 0:
        return int(last.argmax())
    return int(torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=generator))


def done(said, asked):
    drawn = asked["sampling_params"]
    return len(said) == drawn["max_tokens"] or (said and said[-1] in set(drawn.get("stop") or ()))


def answer_of(asked, said, logprobs, before):
    told = [None, *before] if asked.get("prompt_logprobs") else None
    ended = "stop" if said[-1] in set(asked["sampling_params"].get("stop") or ()) else "length"
    sequence = {"stop_reason": ended, "tokens": said, "logprobs": logprobs}
    found = {"sequences": [sequence], "prompt_logprobs": told, "type": "sample"}
    return found, lambda: sample_proto(sequence, told)


def read(field):
    return field["data"].copy() if field["dtype"] is None else np.array(field["data"], JSON_TYPES[field["dtype"]])


def json_free(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def forward_backward_proto(logprobs, metrics):
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    tensor = record.fields["logprobs"]
    tensor.dtype, tensor.data = pb.DTYPE_FLOAT32, np.concatenate(logprobs).astype(np.float32).tobytes()
    tensor.offsets = np.cumsum([0, *(4 * len(p) for p in logprobs)]).astype(np.int64).tobytes()
    return message.SerializeToString()


def sample_proto(sequence, told):
    message = pb.SampleResponse()
    one = message.sequences.add()
    one.stop_reason = pb.STOP_REASON_STOP if sequence["stop_reason"] == "stop" else pb.STOP_REASON_LENGTH
    one.tokens = np.array(sequence["tokens"], np.int32).tobytes()
    one.logprobs = np.array(sequence["logprobs"], np.float32).tobytes()
    if told is not None:
        message.prompt_logprobs = np.array([np.nan if p is None else p for p in told], np.float32).tobytes()
    return message.SerializeToString()


def write_base(folder, tiny, seed=0):
    """Write a tiny model and its tokenizer, and return the folder's name."""
    model, tokenizer = tiny()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(Path(folder))
