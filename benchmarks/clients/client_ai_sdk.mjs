// npm install ai @ai-sdk/openai-compatible zod
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const tools_ = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => a + b,
  }),
};

function model(baseURL, apiKey) {
  return createOpenAICompatible({ name: "maporl", baseURL, apiKey, supportsStructuredOutputs: true })("solver");
}

export async function chat(question, baseURL, apiKey) {
  const messages = [{ role: "user", content: question }];
  const first = await generateText({ model: model(baseURL, apiKey), messages });
  messages.push(...first.response.messages, { role: "user", content: "Are you sure?" });
  return (await generateText({ model: model(baseURL, apiKey), messages })).text;
}

export async function tools(prompt, baseURL, apiKey) {
  const options = { model: model(baseURL, apiKey), prompt, tools: tools_, stopWhen: stepCountIs(5) };
  return (await generateText(options)).text;
}

export async function stream(prompt, baseURL, apiKey) {
  const result = streamText({ model: model(baseURL, apiKey), prompt, tools: tools_, stopWhen: stepCountIs(5) });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  return text;
}

export async function structured(prompt, baseURL, apiKey) {
  const output = Output.object({ schema: z.object({ answer: z.int() }) });
  return (await generateText({ model: model(baseURL, apiKey), prompt, output })).output.answer;
}
