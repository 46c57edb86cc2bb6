mod chaos;
mod fences;
mod flow;
mod outgoing;
mod requests;
mod script;
mod violations;
mod wakers;
