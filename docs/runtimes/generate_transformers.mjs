// Greedy decoding with transformers.js of an artefact with signature mask, target onnx or ort.
//
// npm install @huggingface/transformers
// node generate_transformers.mjs FOLDER 16 100 101 102   (16 tokens after a prompt of three)

import { AutoModelForCausalLM, Tensor } from "@huggingface/transformers";

const [folder, count, ...prompt] = process.argv.slice(2);
if (!prompt.length) {
  console.error("usage: node generate_transformers.mjs FOLDER COUNT TOKEN...");
  process.exit(2);
}
const model = await AutoModelForCausalLM.from_pretrained(folder, { subfolder: "", dtype: "fp32", local_files_only: true });
const integers = (values) => new Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
const made = await model.generate({
  input_ids: integers(prompt),
  attention_mask: integers(prompt.map(() => 1)),
  max_new_tokens: Number(count),
  do_sample: false,
});
console.log(made.tolist()[0].slice(prompt.length).map(Number).join(" "));
