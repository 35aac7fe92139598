// npm install openai
import OpenAI from "openai";

const TOOL = {
  name: "add",
  description: "Add two numbers.",
  parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] },
};
const add = ({ a, b }) => String(a + b);

export async function chat(question, baseURL, apiKey) {
  const client = new OpenAI({ baseURL, apiKey });
  const messages = [{ role: "user", content: question }];
  const first = await client.chat.completions.create({ model: "solver", messages });
  messages.push(first.choices[0].message, { role: "user", content: "Are you sure?" });
  return (await client.chat.completions.create({ model: "solver", messages })).choices[0].message.content;
}

export async function tools(question, baseURL, apiKey, stream = false) {
  const client = new OpenAI({ baseURL, apiKey });
  const runner = client.chat.completions.runTools({
    model: "solver",
    stream,
    messages: [{ role: "user", content: question }],
    tools: [{ type: "function", function: { ...TOOL, function: add, parse: JSON.parse } }],
  });
  return await runner.finalContent();
}

export async function stream(question, baseURL, apiKey) {
  return await tools(question, baseURL, apiKey, true);
}

export async function responses(question, baseURL, apiKey) {
  const client = new OpenAI({ baseURL, apiKey });
  const input = [{ role: "user", content: question }];
  const options = { model: "solver", tools: [{ type: "function", strict: true, ...TOOL }] };
  const first = await client.responses.create({ ...options, input });
  const call = first.output.at(-1);
  input.push(...first.output, {
    type: "function_call_output",
    call_id: call.call_id,
    output: add(JSON.parse(call.arguments)),
  });
  return (await client.responses.create({ ...options, input })).output_text;
}

export async function structured(question, baseURL, apiKey) {
  const client = new OpenAI({ baseURL, apiKey });
  const schema = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"] };
  const said = await client.chat.completions.parse({
    model: "solver",
    messages: [{ role: "user", content: question }],
    response_format: { type: "json_schema", json_schema: { name: "sum", schema } },
  });
  return JSON.parse(said.choices[0].message.content).answer;
}
