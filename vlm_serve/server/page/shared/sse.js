// Server-sent events from a fetched response: EventSource cannot carry an Authorization header.

/**
 * Yields `{event, id, data}` of every message in the stream.
 * @param {Response} response
 */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const message = parsed(block);
        if (message !== null) yield message;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const message = { event: "message", id: null, data: null };
  const data = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue; // a comment, or a field without a value
    const value = line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    const name = line.slice(0, colon);
    if (name === "data") data.push(value);
    else if (name === "event" || name === "id") message[name] = value;
  }
  return data.length ? { ...message, data: data.join("\n") } : null;
}
