// Conversations and media in the browser's IndexedDB, so that they are there after a reload. Where
// the browser keeps nothing (a private window, say) they are held in memory.
//
// A medium is {id, conversation, kind, name, blob, hashes, example}: `hashes` are those by which the
// server's reports name it; `example` is true of the page's own. A conversation is what conversation.js makes.

const STORES = ["conversations", "media"];

let opened = null;
let memory = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("vlm-serve", 1);
    asked.onupgradeneeded = () =>
      STORES.forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" }));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  }).catch(() => {
    memory = new Map(STORES.map((name) => [name, new Map()]));
    return null;
  });
  return opened;
}

async function run(name, mode, act, actInMemory) {
  const database = await open();
  if (database === null) return actInMemory(memory.get(name));
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(name, mode);
    const asked = act(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

function all(name) {
  return run(
    name,
    "readonly",
    (store) => store.getAll(),
    (map) => [...map.values()].map((each) => structuredClone(each)),
  );
}

function put(name, record) {
  return run(
    name,
    "readwrite",
    (store) => store.put(record),
    (map) => map.set(record.id, structuredClone(record)),
  );
}

function remove(name, id) {
  return run(
    name,
    "readwrite",
    (store) => store.delete(id),
    (map) => map.delete(id),
  );
}

/** False if what is written here is gone with the tab. */
export async function isLasting() {
  return (await open()) !== null;
}

export const conversations = {
  all: async () => (await all("conversations")).sort((a, b) => b.updated - a.updated),
  get: (id) =>
    run(
      "conversations",
      "readonly",
      (store) => store.get(id),
      (map) => structuredClone(map.get(id)),
    ),
  put: (conversation) => put("conversations", conversation),
  remove: async (id) => {
    await remove("conversations", id);
    for (const medium of await all("media"))
      if (medium.conversation === id) await remove("media", medium.id);
  },
};

export const media = { all: () => all("media"), put: (medium) => put("media", medium) };
