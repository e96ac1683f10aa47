"""What an engine imports while it starts, for the process that the engines are forked from."""

# ruff: noqa: F401
from vllm import LLM
from vllm.model_executor.models import deepseek_v2, llama, qwen3_next
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import llm_engine
from vllm.v1.executor import uniproc_executor
from vllm.v1.worker import cpu_model_runner, cpu_worker

import ucmcache.connector
