// Loaded before a server that has no option for its address: it listens on 127.0.0.1 only.
const net = require("net");
const listen = net.Server.prototype.listen;

net.Server.prototype.listen = function (where, ...rest) {
  if (typeof where === "object" && where !== null && "port" in where) {
    return listen.call(this, { ...where, host: "127.0.0.1" }, ...rest);
  }
  if (typeof where === "number") {
    const others = rest.filter((each) => typeof each !== "string");
    return listen.call(this, where, "127.0.0.1", ...others);
  }
  return listen.call(this, where, ...rest);
};
