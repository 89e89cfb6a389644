"""An agent loop of two turns: the policy writes, a tool answers with the sum, the policy writes."""

import re
from uuid import uuid4

import verl_faults
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class CalculatorLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        prompt = await self.ct_build_initial_tokens(messages)
        numbers = map(int, re.findall(r"\d+", messages[-1]["content"]))
        tool = self.tokenizer.encode(f"<user>{sum(numbers)}=<bot>", add_special_tokens=False)
        ids, mask, logp, metrics = [], [], [], {"num_preempted": 0}
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt + ids,
                sampling_params={**sampling_params, "max_tokens": 8},
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            logp += output.log_probs
            if turn == 0:
                ids += tool
                mask += [int(verl_faults.trains_environment())] * len(tool)
                logp += [0.0] * len(tool)
        limit = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids[:limit],
            response_mask=mask[:limit],
            response_logprobs=logp[:limit],
            num_turns=4,
            metrics=metrics,
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
