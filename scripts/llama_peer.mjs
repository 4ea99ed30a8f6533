// llama.cpp as a peer for bench_cpu_engine.py, through the prebuilt node-llama-cpp addon.
//   node llama_peer.mjs PACKAGE_FOLDER MODEL.gguf THREADS
// Reads one JSON request a line ({"prompt": [ids], "tokens": n}), answers one JSON line with the
// seconds of the prompt (to its first token) and of each further token. Greedy, one stream.
// Bench only: the product never loads it.
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads] = process.argv.slice(2);
const entry = path.join(path.resolve(folder), "node_modules/node-llama-cpp/dist/index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry));

const llama = await getLlama({
    build: "never",
    gpu: false,
    maxThreads: Number(threads),
    logLevel: LlamaLogLevel.error
});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: 2048,
    batchSize: 512,
    threads: Number(threads)
});
const sequence = context.getSequence();

async function measure({prompt, tokens}) {
    await sequence.clearHistory();
    const times = [];
    const produced = [];
    let last = performance.now();
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        const now = performance.now();
        times.push((now - last) / 1000);
        produced.push(token);
        last = now;
        if (produced.length >= tokens) break;
    }
    return {prompt_seconds: times[0], token_seconds: times.slice(1), tokens: produced};
}

console.log(JSON.stringify({ready: true, system: llama.systemInfo}));
for await (const line of readline.createInterface({input: process.stdin})) {
    console.log(JSON.stringify(await measure(JSON.parse(line))));
}
process.exit(0);
