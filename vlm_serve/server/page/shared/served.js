// What is served: the model's name, whether it sees pictures, and how long a request may be.

import { requestJson } from "./api.js";
import { Value } from "./value.js";

/** {name, sees, limit}: `sees` is null and `limit` (bytes) infinite as long as the server has not said. */
export const served = new Value({ name: "", sees: null, limit: Infinity });

/** Asks the server. @throws what `request` does */
export async function learnServed() {
  const { data } = await requestJson("/v1/models");
  const told = { name: data[0].id, sees: null, limit: Infinity };
  try {
    const info = await requestJson("/get_model_info");
    told.sees = info.has_image_understanding;
    told.limit = info.max_body_bytes ?? Infinity;
  } catch {
    // A gateway may not have the route; the server then says itself what it does not take.
  }
  served.set(told);
}
